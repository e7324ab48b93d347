"""Runs in short, computed from the records: for `offbook runs` and `show`, and for pages."""
