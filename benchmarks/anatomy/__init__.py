"""Where the time of one small call goes."""
