# Plain comments as doxygen wants them: of the file, before a declaration, behind it on its line.
# Code within a comment is indented further.
1s#^//#/// \\file\n///#
s#^//   #///       #
s#^([[:space:]]*)//( |$)#\1///\2#
s#([;,{}][[:space:]]+)// #\1///< #
