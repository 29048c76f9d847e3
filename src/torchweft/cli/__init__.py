"""The command ``torchweft``."""
