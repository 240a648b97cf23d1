"""What runs inside the target: copied to the control folder of a run, beside the files of the torch backend."""
