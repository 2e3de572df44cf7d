"""Every message on the wire, subjects, codec and error codes. Imports nothing else of the project."""
