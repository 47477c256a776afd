# a comment
@problemName Tiny
@timeStamps false
@univariate false
@dimensions 2
@equalLength true
@seriesLength 3
@classLabel true a b
@data
1,2,3:4,?,6:a
-1e3,0.5,NaN:0,0,0:b
