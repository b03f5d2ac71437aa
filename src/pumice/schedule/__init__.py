"""Orders of loops: dataflows, tiles and schedules as plain data, and what tuning found. No tensors, no launches."""
