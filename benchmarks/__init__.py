"""What `make quickstart`, `make smoke`, `make bench-heads`, `make bench-train` and `make gpu` run. Not in the wheel."""
