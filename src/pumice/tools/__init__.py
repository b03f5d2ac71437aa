"""Command line, report and bench. Imported by nobody; imports no plotting or command-line library itself."""
