"""Runs on disk: the folder, its files and their digests."""
