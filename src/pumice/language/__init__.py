"""What is computed: statements, formats and their rewrites, as text and symbols. No torch here."""
