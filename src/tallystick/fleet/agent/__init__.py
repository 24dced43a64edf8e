"""What runs beside a chip: snapshots of its memory, its log, and the collector of logs."""
