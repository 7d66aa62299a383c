"""The command-line programs of pykvq."""
