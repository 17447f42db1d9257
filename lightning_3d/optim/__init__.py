"""What an optimizer step needs beside the optimizer: decay groups, learning-rate schedules, clipping."""
