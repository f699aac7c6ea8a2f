"""Ask each host of a launch target about itself before a run, and compare the answers."""
