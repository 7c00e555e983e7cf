"""A whole service under attack: honest clients among hostile clients, pods and watchers."""
