"""The only room that talks to Spark: sessions, what a source is, how large it is, how its rows come out."""
