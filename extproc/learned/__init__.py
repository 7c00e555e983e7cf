"""What do we believe of the pods' costs and limits? An estimator a file, fed with what reports say
and how requests end: prompts, loads, limits, time per token, outliers, slowness.

Begin with `concurrency`, one limit of one endpoint. Nothing here knows which endpoints there are:
`pods` makes the estimators, feeds them and reads them. `sequential` says which of two ways to serve
requests is worse, of policies or of versions.
"""
