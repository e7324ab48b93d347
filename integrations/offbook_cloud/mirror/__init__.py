"""A copy of a server's models at another place: uploaded after each step, and pulled when the directory is lost."""
