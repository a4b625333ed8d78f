"""What `make gpu` runs: `pack.sh` gathers what travels to a GPU machine, `rung.sh` measures there, rung by rung.
`rehearsal.py` needs no GPU."""
