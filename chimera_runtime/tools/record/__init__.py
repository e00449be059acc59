"""`--trace`: the record of every operation of a lane."""
