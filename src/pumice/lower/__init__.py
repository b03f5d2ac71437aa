"""For which machine: the operators as loops, and the faster forms of them per device."""
