"""Formats: plan items to stored bytes and back, each one a strategy in the registry."""
