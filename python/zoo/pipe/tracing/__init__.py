"""Any model as a pipeline: its forward is traced as a graph, whose nodes become the layers of stages."""
