"""One file a kind of device, called as plans call the kind; each has its ``KIND``. Nothing else lies here."""
