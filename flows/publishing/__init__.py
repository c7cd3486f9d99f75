"""Publication of a finished run: registered versions, their aliases, and the record of its end."""
