"""The dashboard: pages rendered on the server over the records, for people who read what a run did."""
