"""What a Python process that another one started with Weft installed finds first."""
