"""Fails when calls take more CPU time than at an earlier commit; see `README.md` here."""
