"""What `make bench-*` and `make gpu` run; measurements of Headstart itself. Not in the wheel."""
