"""What the dashboard's pages, the terminal and exported files show, computed from the records and the model folders."""
