"""`offbook doctor`: checks this machine, and names a fix for each fault."""
