"""One file for each kind of device, with the kind's name in plans; each has its ``KIND``. There are no other files."""
