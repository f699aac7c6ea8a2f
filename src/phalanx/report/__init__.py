"""Shows a run to people: progress, summary, tables, drawings. Everything here only reads what the run wrote."""
