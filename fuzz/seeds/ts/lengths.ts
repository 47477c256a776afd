@problemName T
@univariate true
@classLabel true 1 2 3
@data
1,2:1
3:2
+4,5,6,7:3
