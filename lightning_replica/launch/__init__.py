"""How the ranks come to be: the supervisor, the launcher that becomes it, the way in for a replacement."""
