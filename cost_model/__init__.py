"""The cost of mixing: closed forms, a count of the graph, and the check in every rewrite."""
