"""Steps and phases of a trace: where each forward pass begins and ends, and whether it is prefill or decode.

``find_steps`` finds them, ``label`` names their phases, ``StepFigures`` counts what each one holds. What a range's name
says of steps stands in ``names`` alone.
"""
