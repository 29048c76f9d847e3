"""The command ``torchweft``; each subcommand has a file of its own."""
