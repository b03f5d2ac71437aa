"""Statements, storage formats and their rewrites, as text and symbols. No torch here."""
