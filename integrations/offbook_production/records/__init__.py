"""What the wing keeps in the records, and reads and deletes there."""
