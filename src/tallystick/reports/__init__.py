"""One report object, shown on a terminal or as JSON, Markdown or HTML."""
