"""What `make gpu` runs: `pack.sh` gathers what travels to a GPU machine, and `rung.sh` measures there, a rung at a time."""
