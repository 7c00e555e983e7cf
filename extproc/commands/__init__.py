"""What can I type? The commands of `extproc`, one file each; begin with `main`."""
