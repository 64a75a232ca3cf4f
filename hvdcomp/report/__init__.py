"""What runs did, to look at: figures, one page in HTML, and a live view in the terminal."""
