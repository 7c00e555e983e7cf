"""The commands of `extproc`, one file each."""
