"""What other training tools need from us beyond a region; import the one you use, none is loaded with `recollect`."""
