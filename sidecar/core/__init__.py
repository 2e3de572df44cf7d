"""Every decision about a run, pure and synchronous: state, input and now come in, values go out. No I/O."""
