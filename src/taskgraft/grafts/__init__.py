"""Grafts on disk: which backbone each belongs to, what is in its files, and the folder that holds many of them."""
