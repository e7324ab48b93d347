"""The command `offbook`: a module per command, or per few that belong together. Nothing else imports this room."""
