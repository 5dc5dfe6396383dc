"""Parsing of command lines: configuration and other words."""
