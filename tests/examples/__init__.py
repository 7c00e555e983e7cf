"""The folder examples/, each example run as its head says."""
