"""Short programs: from the start of the processes to the first call, step and end."""
