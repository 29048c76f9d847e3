"""The command ``weft``; each subcommand has a file of its own."""
