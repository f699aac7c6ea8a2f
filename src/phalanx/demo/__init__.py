"""The demo: two small real jobs, trained on one device and on several, proven equal."""
